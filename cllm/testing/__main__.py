"""`python -m cllm.testing`: the scripted server, and its workers."""

import sys

from cllm.testing.scripted import main

sys.exit(main(sys.argv[1:]))
