"""Mistakes made in the code on purpose, one at a time, each followed by the tests that execute its lines, all in one process.

    make mutants ARGS="jobs letters"           25 mistakes of each of these areas, by the date
    make mutants ARGS="--seed 7 --count 4"     four of every area, another sample
    make mutants ARGS="ick --only mark"        of the area's files whose paths have this word
    make mutants ARGS="jobs --record"          first runs all quick tests anew, to learn what each executes
    make mutants ARGS=--guarantees             those of guarantees.toml
    make mutants ARGS="--file mine.toml"       mistakes of your own, written like those of guarantees.toml

``recording`` keeps which test executes what, ``mutations`` makes mutants of Python, ``queries`` those of SQL and Lua, ``swapping``
puts them into the running process, ``lane`` runs the tests, and ``__main__`` has the areas and the report.
"""
