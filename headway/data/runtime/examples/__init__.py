"""Examples and what is made of them: bytes, operators, random numbers, what loading them cost."""
