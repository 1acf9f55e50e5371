"""Memory, time, search and dry run of a training job, before anyone rents its nodes."""
