"""The report: one page about a run, to look at rather than to read; small for graphs of any size.

task      what a job runs
write     the sections of the page, from what was gathered
gather    what the page shows, from the tables of the run
sample    which nodes are shown
layout    where they are drawn, and which belong together
stage     where they are at every step
why       which links and rhythms made the vectors of some of them
scene     the map as data for the script of the page, and in words
plots     the charts of the other sections
charts    axes and marks as SVG
page      sections as one file of HTML
serve     the page live, for one person
answers   what a live page asks of a run
notebook  the page inside a notebook
"""
