"""What a training's curves mean, and what to change: pure rules over what a stage reported."""
