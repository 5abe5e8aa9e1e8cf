"""What a worker would do with a backlog or a trace: which job each free slot gets, when, and why.

Owns simulated time, the format of traces, and what is shown of a run. The decisions are those of ``core``: nothing in
here picks anything by itself. Must not know Celery, Kombu, Redis or the settings' spellings.
"""
