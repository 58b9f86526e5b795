"""The workshop beside the library: what measures Headway, and what trains with it.

`bench` times attention against other implementations. `recipe` trains a small language model.
`experiments` check claims about stable training. `cli` holds their commands, which `headway` finds
by the entry-point group "headway.commands". The library never imports this package.
"""
