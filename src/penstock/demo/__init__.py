"""Rocket Rides: the pipeline under fire, and an account of it at the end.

An HTTP API changes rides in SERIALIZABLE transactions; clients call it over real HTTP; records flow to two consumers that
keep totals, and what is dirty to a third that keeps an index; batches are sent twice, consumers crash between apply and commit, a process is killed.  At the end the
canonical totals are compared with every consumer's, to the cent, and every record with its effects.

``rides`` is the application, ``api`` and ``simulator`` its two ends, ``mischief`` what goes wrong, ``verdict`` the
account, ``run`` all of it together.
"""
