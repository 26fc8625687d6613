"""The report: one page about a run, to look at rather than to read; small for graphs of any size.

task      what a job runs
write     the sections of the page, from what was gathered
gather    what the page shows, from the tables of the run
sample    which nodes are shown
layout    where they are drawn, and which belong together
plots     the plots, with Bokeh
page      sections as one file of HTML
"""
