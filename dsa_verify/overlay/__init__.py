"""The overlay, which checks a live server, and the ring of its last rounds (ring.py). What a server imports is here."""

from dsa_verify.overlay.overlay import NullOverlay, Overlay

__all__ = ["NullOverlay", "Overlay"]
