"""SGLang's allocators as targets: finding a release, fetching it, loading its classes.

`load.load(spec)` returns the allocator classes of one release, unmodified; `fetch` puts a release into the
cache; `releases` says where a release keeps what; `standins` replaces heavy packages the allocators never
touch; `kinds` builds every kind of allocator and looks into it, on the KV pools that `pools` stands in for;
`isolation` keeps the side effects of the import away from the host process.
"""
