"""What the paths gain: measured beside upstream, in one process group, on emulated nodes."""
