"""Jobs that adapt: how many devices and which batch size make the most useful progress (Pollux, OSDI 2021)."""
