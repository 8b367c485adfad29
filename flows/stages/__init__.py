"""How one stage is made: its lock, its slots of the machine, its process, Ray Train around it."""
