"""`python -m octavo.dynamo`."""

import sys

if __name__ == "__main__":
    try:
        from dynamo.common.backend.run import run
    except ImportError as error:
        sys.exit(f"error: python -m octavo.dynamo needs {error.name}: pip install 'octavo[server]' ai-dynamo")

    from octavo.dynamo.engine import OctavoEngine

    run(OctavoEngine)
