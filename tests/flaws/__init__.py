"""One test per flaw of the peer (contract, section 16), each named after the right behaviour."""
