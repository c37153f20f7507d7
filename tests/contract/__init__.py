"""The contracts of `ModelRunner` and of the step loop over it, on the fake and on real llama.cpp alike."""
