"""Mistakes made in the code on purpose, one at a time, each followed by the tests that execute its lines.

    make mutants                               a sample of 60 by the date
    make mutants ARGS="--seed 7 --count 100"   another sample
    make mutants ARGS="--only reconciling"     every mutant of a folder
    make mutants ARGS="--file mine.toml"       mistakes of your own, written like those of guarantees.toml
    make mutants ARGS="--record"               which tests execute what, anew: once in a while, as long as the suite takes

``mutations`` makes mutants of Python, ``queries`` those of SQL and Lua, ``recorder`` finds out which tests execute what, and
``__main__`` tries them in copies of the checkout.
"""
