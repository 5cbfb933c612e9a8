"""One copy of a job per device of unlike speed (HadarE): steps dealt by speed, slot by slot, simulated."""
