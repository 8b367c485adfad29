"""What is declared: Hydra composes it, dataclasses check it, and nothing of Hydra passes this border."""
