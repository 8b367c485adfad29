"""How one stage is run: its lock, its slots on the machine, its process, Ray Train."""
