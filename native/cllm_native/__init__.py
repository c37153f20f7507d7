"""The native library of cllm. Importing it loads nothing: cllm finds the files beside this one."""
