"""The admin token, the certificate authority, and the enrolment of devices."""
