"""How one stage is made: its lease, its slots of the machine, its process, Ray Train around it."""
