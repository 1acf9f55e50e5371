"""Checks of the network between the nodes of a job, by traffic of the doctor's own."""
