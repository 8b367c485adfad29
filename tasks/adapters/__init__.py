"""Adapters: LoRA, over weights in 4 bits too, saved by themselves or merged."""
