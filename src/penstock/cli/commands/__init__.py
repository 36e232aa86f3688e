"""The commands of ``penstock``, by what they are for; ``app`` imports the one that is run.

    services        run, stream, consume, work: until a signal, or with --drain until nothing is
                    left
    installation    init: tables, triggers, roles and users
    health          status, doctor
    lookups         tail, trace, explain: single records
    comparisons     verify, reconcile: everything against everything
    redelivery      dead-letters
    registrations   consumers, channels
    resets          reset, replay
    rocket_rides    demo

Each reads its options, calls ``penstock.operating`` or what runs the work, and prints a table,
lines or JSON.  A command that changes what an operator has to decide shows a plan, and carries it
out with ``--apply``.
"""
