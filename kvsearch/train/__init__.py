"""Training a model under the policy that it will run with, or after it lost channels."""
