"""Configuration: composed by Hydra, checked by dataclasses; no other package sees Hydra's types."""
