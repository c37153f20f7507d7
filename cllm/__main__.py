"""`python -m cllm`: the same as `cllm`."""

from cllm.cli.main import main

if __name__ == "__main__":
    main()
