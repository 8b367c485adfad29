"""What an artifact is and where it came from. Imports no torch, no ray, no prefect."""
