"""What the managers of all models share: requests, rows and steps, and how bytes lie in pages.

    store         where the pages of requests are and who has a row, as a protocol
    batch_store   on a `KvCacheManager` and its Batch: resident, or with history on the host
    page_store    on a `Storage`: resident, and prompts may use scratch pages
    config        what configurations of all models share: features, offload
    manager       the calls of a manager that are about requests and steps
    arguments     arrays that calls refuse
    streams       the stream that an engine works on
    forward_table page tables in the order of a forward
    slot_mapping  where tokens lie, in bytes
    scatter       writing and reading them there
    floats        small floats, of which codecs are made

Nothing here imports torch before a store is made or an array handed in.
"""
