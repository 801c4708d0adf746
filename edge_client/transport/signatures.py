"""Signatures of devices, made with the keys of their certificates and verified by these (ECDSA with SHA-256 over P-256)."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

DEVICE_URI = "spiffe://fedloop/device/"
"""Beginning of the URI in a device's certificate; the device's id follows."""

_ALGORITHM = ec.ECDSA(SHA256())


class BadCertificate(ValueError):
    """The certificate is not that of a device of this fleet."""


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    return key.sign(content, _ALGORITHM)


def device_of(certificate: x509.Certificate) -> str:
    """The id of the device that the certificate names. Its signature is not checked. Raises: BadCertificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    if len(uris) != 1 or not uris[0].startswith(DEVICE_URI):
        raise BadCertificate(f"this certificate does not have exactly one URI {DEVICE_URI}<id>")
    return uris[0].removeprefix(DEVICE_URI)


class DeviceKeys:
    """The keys of devices whose certificates the fleet's CA has signed."""

    def __init__(self, ca: x509.Certificate) -> None:
        self._ca = ca
        self._keys: dict[str, ec.EllipticCurvePublicKey] = {}

    def add(self, device: str, pem: str) -> None:
        """Takes the key of a device from its certificate.

        Dates are not checked: a certificate that has expired was this device's, and its key is still no one else's.

        Raises:
            BadCertificate: it is another's, or not signed by the CA.
        """
        try:
            certificate = x509.load_pem_x509_certificate(pem.encode())
            certificate.verify_directly_issued_by(self._ca)
            key = certificate.public_key()
        except (ValueError, TypeError, InvalidSignature) as error:
            raise BadCertificate(f"the certificate of {device} is not of this fleet: {error!r}") from None
        if (named := device_of(certificate)) != device:
            raise BadCertificate(f"the certificate of {device} is that of {named}")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise BadCertificate(f"the certificate of {device} has no key on an elliptic curve")
        self._keys[device] = key

    def verify(self, device: str, content: bytes, signature: bytes) -> bool:
        """Whether the signature is this device's."""
        key = self._keys.get(device)
        if key is None:
            return False
        try:
            key.verify(signature, content, _ALGORITHM)
        except InvalidSignature:
            return False
        return True
