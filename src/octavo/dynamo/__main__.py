"""`python -m octavo.dynamo`."""

from dynamo.common.backend.run import run

from octavo.dynamo.engine import OctavoEngine

if __name__ == "__main__":
    run(OctavoEngine)
