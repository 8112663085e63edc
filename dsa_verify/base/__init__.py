"""Errors, devices, files and versions: what every other room may use. Nothing here imports a room of this project."""
