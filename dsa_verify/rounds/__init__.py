"""Rounds that nobody has to draw: the scripted matrix and the extreme configurations."""
