"""The part of the fault room that runs beside a job: supervision, warm restarts."""
