"""Questions to a published run: who is near, how a node moved, by which rhythm it lives, will two link.

    run         `load_run` and `Run`: a published run with every question as a method
    published   the manifest and the tables of a run; what the questions below are asked of
    tables      a table as Arrow, polars, pandas, NumPy or dask
    nodes       ids as the user knows them → rows; what was meant where one is unknown
    neighbors   the nearest nodes, exactly
    trajectory  one node over time, and plots of it
    rhythm      the periods of a node, and who shares them
    changes     what changed in the window, and whether chance did it
    score       the model's own score of pairs
    explain     which links, steps and rhythms made a vector; which common directions make a score
    index       the vectors once more, for quick queries
    outside     vectors from elsewhere beside those of a run, of the same space
    classifier  labels of nodes by their vectors, kept for later runs of the same space
    export      the vectors in the formats of other programs

Vectors are read by storage/vectors.py, in blocks: nothing here holds more than a few of them, however many
nodes there are.
"""
