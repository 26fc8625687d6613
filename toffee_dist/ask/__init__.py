"""Questions to a published run: who is near, how a node moved, by which rhythm it lives, will two link.

    nodes       ids as the user knows them → rows; what was meant where one is unknown
    vectors     rows from disk in blocks, from the Parquet parts or from the index
    neighbors   the nearest nodes, exactly
    trajectory  one node over time, and plots of it
    rhythm      the periods of a node, and who shares them
    score       the model's own score of pairs

Nothing here holds more than a few blocks of vectors, however many nodes there are.
"""

from toffee_dist.ask.neighbors import neighbors
from toffee_dist.ask.nodes import find_node, find_step
from toffee_dist.ask.rhythm import Rhythm, find_rhythm
from toffee_dist.ask.score import score_pairs
from toffee_dist.ask.trajectory import NodeTrajectory, read_trajectory
from toffee_dist.ask.vectors import build_index

__all__ = [
    "NodeTrajectory",
    "Rhythm",
    "build_index",
    "find_node",
    "find_rhythm",
    "find_step",
    "neighbors",
    "read_trajectory",
    "score_pairs",
]
