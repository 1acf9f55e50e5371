"""What an EC2 instance knows of itself: its metadata service, version 2."""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass

from megatron.efa.errors import EfaError

ENDPOINT = "http://169.254.169.254"
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Identity:
    instance: str
    kind: str
    region: str
    zone: str


def identity() -> Identity:
    """This instance's. Raises EfaError off EC2, and where the service is switched off.

    AWS_EC2_METADATA_SERVICE_ENDPOINT names another address, as for AWS's own tools.
    """
    endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ENDPOINT).rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        token = _ask("PUT", f"{endpoint}/latest/api/token", lifetime)
        document = f"{endpoint}/latest/dynamic/instance-identity/document"
        said = json.loads(_ask("GET", document, {"X-aws-ec2-metadata-token": token}))
        return Identity(
            said["instanceId"], said["instanceType"], said["region"], said["availabilityZone"]
        )
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise EfaError(
            f"the instance metadata service at {endpoint} does not tell which instance this is "
            f"({error}): run this on EC2 with IMDSv2 allowed (a hop limit of 2 in containers), or "
            "set AWS_REGION"
        ) from error


def _ask(method: str, url: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return answer.read().decode()
