package secure

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"slices"
)

// A job token from which a key may be derived has this many characters, that many of them different: anybody who
// connects sees the public key, and can try guesses at the token without asking again.
const (
	leastToken   = 26 // 128 bits, as rand.Text has them; openssl rand -hex 16 gives 32
	leastLetters = 8
)

// ofToken derives a server's key from the job token. A client takes no other one. It proves itself by the token, which
// it sends once the server is known, so it needs no certificate.
func ofToken(token string) (*identity, error) {
	letters := []byte(token)
	slices.Sort(letters)
	if len(token) < leastToken || len(slices.Compact(letters)) < leastLetters {
		return nil, fmt.Errorf("--tls=auto derives a key from the job token, which can be guessed at leisure if it is weak: "+
			"need a random token of at least %d characters, such as the output of: openssl rand -hex 16; this job's has %d",
			leastToken, len(token))
	}
	seed, err := hkdf.Key(sha256.New, []byte(token), nil, "dlrover-run: key of TLS, version 1", ed25519.SeedSize)
	if err != nil {
		return nil, fmt.Errorf("--tls=auto: %w", err)
	}
	key := ed25519.NewKeyFromSeed(seed)
	public := key.Public().(ed25519.PublicKey)
	id := newIdentity(&tls.Certificate{Certificate: [][]byte{certificate(key, public)}, PrivateKey: key})
	id.client.Certificates = nil
	id.trusts = func(addr string, s tls.ConnectionState) error {
		if shown, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey); ok && shown.Equal(public) {
			return nil
		}
		return &Error{text: fmt.Sprintf("the server at %s has another key than the one of this job token: it has another "+
			"token, or no --tls=auto", addr)}
	}
	return id, nil
}

// A certificate in DER, apart from its key and its signature: serial number 1, Ed25519, issuer and subject CN=dlrover,
// from 1970 to 9999. Clients look at the key alone; X.509 is how TLS carries it.
const (
	beforeKey = "\xa0\x03\x02\x01\x02\x02\x01\x01\x30\x05\x06\x03\x2b\x65\x70" + name +
		"\x30\x20\x17\x0d700101000000Z\x18\x0f99991231235959Z" + name + "\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00"
	name     = "\x30\x12\x31\x10\x30\x0e\x06\x03\x55\x04\x03\x0c\x07dlrover"
	afterKey = "\x30\x05\x06\x03\x2b\x65\x70\x03\x41\x00"
)

// certificate is the self-signed certificate of a key. crypto/x509 would add 60 kB to the launcher to make one.
func certificate(key ed25519.PrivateKey, public ed25519.PublicKey) []byte {
	signed := sequence(beforeKey + string(public))
	return []byte(sequence(signed + afterKey + string(ed25519.Sign(key, []byte(signed)))))
}

// sequence is a SEQUENCE of 128 to 65,535 bytes.
func sequence(of string) string {
	if len(of) < 256 {
		return "\x30\x81" + string([]byte{byte(len(of))}) + of
	}
	return "\x30\x82" + string([]byte{byte(len(of) >> 8), byte(len(of))}) + of
}
