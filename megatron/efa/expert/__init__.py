"""The expert path: tokens cross the network once per node that hosts one of their experts."""
