"""A worker of NVIDIA Dynamo: `python -m octavo.dynamo`. Needs the package `ai-dynamo`."""
