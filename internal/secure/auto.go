package secure

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"slices"
)

// A job token from which a key may be derived has this many characters, that many of them different: anybody who
// connects sees the public key, and can try guesses at the token without asking again.
const (
	leastToken   = 26 // 128 bits, as rand.Text has them; openssl rand -hex 16 gives 32
	leastLetters = 8
)

// pinned is the key of one job token.
type pinned struct {
	public ed25519.PublicKey
	cert   tls.Certificate
	hint   string // by which a client tells a server with several keys that it takes this one
}

// ofTokens derives a key from each job token; there are two while the token changes. A server shows the first one that
// the client takes, or else its first one. A client takes no other ones. It proves itself by the token, which it sends
// once the server is known, so it needs no certificate.
func ofTokens(tokens []string) (*identity, error) {
	var keys []pinned
	for _, token := range tokens {
		key, err := ofToken(token)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	id := newIdentity(&keys[0].cert)
	id.client.Certificates, id.server.Certificates = nil, nil
	id.client.NextProtos = slices.Clone(protocols)
	for _, key := range keys {
		id.client.NextProtos = append(id.client.NextProtos, key.hint)
	}
	id.server.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		for i := range keys {
			if slices.Contains(hello.SupportedProtos, keys[i].hint) {
				return &keys[i].cert, nil
			}
		}
		return &keys[0].cert, nil
	}
	id.trusts = func(addr string, s tls.ConnectionState) error {
		shown, _ := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
		if slices.ContainsFunc(keys, func(key pinned) bool { return key.public.Equal(shown) }) {
			return nil
		}
		return &Error{text: fmt.Sprintf("the server at %s has another key than the one of this job token: it has another "+
			"token, or no --tls=auto", addr)}
	}
	return id, nil
}

// ofToken derives the key of a job token.
func ofToken(token string) (p pinned, err error) {
	letters := []byte(token)
	slices.Sort(letters)
	if len(token) < leastToken || len(slices.Compact(letters)) < leastLetters {
		return p, fmt.Errorf("--tls=auto derives a key from the job token, which can be guessed at leisure if it is weak: "+
			"need a random token of at least %d characters, such as the output of: openssl rand -hex 16; this job's has %d",
			leastToken, len(token))
	}
	seed, err := hkdf.Key(sha256.New, []byte(token), nil, "dlrover-run: key of TLS, version 1", ed25519.SeedSize)
	if err != nil {
		return p, fmt.Errorf("--tls=auto: %w", err)
	}
	key := ed25519.NewKeyFromSeed(seed)
	p.public = key.Public().(ed25519.PublicKey)
	p.cert = tls.Certificate{Certificate: [][]byte{certificate(key, p.public)}, PrivateKey: key}
	// Clients send the hint in the clear, as a protocol that no server speaks. Two bytes tell keys apart, and are of
	// no use to guess a token.
	sum := sha256.Sum256(p.public)
	p.hint = "dlrover-key-" + hex.EncodeToString(sum[:2])
	return p, nil
}

// derived is what the tokens say now. Ones that cannot be used leave it as it was.
func (l *Layer) derived() *identity {
	now := l.tokens()
	l.mu.Lock()
	defer l.mu.Unlock()
	if slices.Equal(now, l.known) {
		return l.id
	}
	l.known = now
	id, err := ofTokens(now)
	if err != nil {
		l.log.Warn("the job token has changed, and no key can be derived; the former one counts", "err", err)
		return l.id
	}
	l.id = id
	return id
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
