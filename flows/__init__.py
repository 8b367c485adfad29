"""When and where stages run: Hydra, Prefect, Ray and the command line."""
