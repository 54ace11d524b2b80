"""The numbers in README and guide: each is computed from the JSON of a measurement.

* ``sources``: the JSON files, and how a number is printed.
* ``claims``, ``vllm``: the sentences that state measured numbers, and how each number follows from the JSON.
* ``readme``: README's tables.
* ``given``: numbers that look like measurements and are not, with the reason.
* ``pages``: writes the numbers into the pages, and finds numbers that nobody has computed.
"""
