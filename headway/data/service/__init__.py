"""The data server: jobs of one host share what is prepared (Joader, Seneca, CoorDL)."""
