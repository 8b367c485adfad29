"""A pipeline in short, before or beside the real one: does all of it work, and does it survive interruptions?"""
