"""Shows the pipeline on one page, in a browser; it is safe to leave open.

    web_application  the pages' addresses, and what every request goes through
    access           who may see and do what: a link, a file of users, a proxy, or the application
                     around it
    status_sampler   one reader of the status for all viewers, with the history of the last hour
    history          throughput and lag of an hour or a day, by Prometheus or from memory
    reading          few connections for all pages, and one examination by the doctor; what a
                     visitor may not see of a status
    job_pages        the pages of jobs
    record_pages     the page of a record
    pages            what each page shows; the same values as JSON under the same address with
                     ``.json``
    actions          what changes something: a plan, its digest, then the change, and who did it
    rendering        templates, numbers and times, lines drawn as SVG
    serving          an HTTP server for it, in this process

It asks servers for nothing that no command asks for.  No script but ``static/console.js`` runs,
nothing is loaded from another host, and every page can be read without a script.

    from penstock.console import make_console

    application.mount("/penstock", make_console(pipeline, database_url, redis_url, access=allow))
"""

from penstock.console.access import Visitor
from penstock.console.web_application import make_console

__all__ = ["Visitor", "make_console"]
