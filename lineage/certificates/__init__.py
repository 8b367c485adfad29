"""How a training survives interruptions: measured in short, written once, named by the manifests of its recipe."""
