"""What the managers of all models share: requests, rows and steps, whatever their layers hold.

    store         where the pages of requests are and who has a row, as a protocol
    batch_store   on a `KvCacheManager` and its Batch: resident, or with history on the host
    page_store    on a `Storage`: resident, and prompts may use scratch pages
    manager       the calls of a manager that are about requests and steps
    arguments     arrays that calls refuse
    streams       the stream that an engine works on

Nothing here imports torch before a store is made.
"""
