"""The main job on a planted graph."""
