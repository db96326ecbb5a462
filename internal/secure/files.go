package secure

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
)

// maxFile bounds a file with certificates or a key, in bytes.
const maxFile = 1 << 20

// stamp tells versions of a file apart. Kubernetes replaces the directory of a Secret, so the file is another one then.
type stamp struct {
	info os.FileInfo // nil: there is none
}

func stampOf(path string) (s stamp) {
	if path != "" {
		s.info, _ = os.Stat(path)
	}
	return s
}

func (s stamp) equal(other stamp) bool {
	a, b := s.info, other.info
	if a == nil || b == nil {
		return a == b
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// identity is what the files say now. Files that cannot be used, as in the middle of a change, leave it as it was.
func (l *Layer) identity() *identity {
	if l.choice.Auto {
		return l.derived()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.looked) < lookEvery {
		return l.id
	}
	before := l.seen
	now := l.look()
	if slices.EqualFunc(before[:], now[:], stamp.equal) {
		return l.id
	}
	id, err := l.read()
	if err != nil {
		l.log.Warn("the files of TLS have changed and cannot be used; their former content counts", "err", err)
		return l.id
	}
	l.log.Info("the files of TLS have changed, and count from now on")
	l.id = id
	return id
}

// look notes which versions of the files there are.
func (l *Layer) look() [3]stamp {
	l.looked = time.Now()
	l.seen = [3]stamp{stampOf(l.choice.Cert), stampOf(l.choice.Key), stampOf(l.choice.CA)}
	return l.seen
}

// read returns the identity that the files have. They are looked at first: a change meanwhile is found later.
func (l *Layer) read() (*identity, error) {
	l.look()
	cert, err := l.choice.pair()
	if err != nil {
		return nil, err
	}
	roots, err := l.choice.authorities()
	if err != nil {
		return nil, err
	}
	id := newIdentity(cert)
	p := peers{ca: l.choice.CA, roots: roots, own: cert}
	id.trusts = p.server
	if id.server != nil && roots != nil {
		id.server.ClientAuth = tls.RequestClientCert
		id.admits = p.client
	}
	return id, nil
}

// pair is the program's own certificate with its key; nil: it has none.
func (c Choice) pair() (*tls.Certificate, error) {
	if c.Cert == "" {
		return nil, nil
	}
	cert, err := openfile.ReadNamed(c.Cert, maxFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert=%s: %w", c.Cert, err)
	}
	key, err := openfile.ReadNamed(c.Key, maxFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-key=%s: %w", c.Key, err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert=%s and --tls-key=%s: %w", c.Cert, c.Key, err)
	}
	return &pair, nil
}

func (c Choice) authorities() (*x509.CertPool, error) {
	if c.CA == "" {
		return nil, nil
	}
	data, err := openfile.ReadNamed(c.CA, maxFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-ca=%s: %w", c.CA, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("--tls-ca=%s: it has no certificate in PEM, which begins with "+
			"-----BEGIN CERTIFICATE-----", c.CA)
	}
	return roots, nil
}

// peers checks certificates of the other side.
type peers struct {
	ca    string // path of --tls-ca
	roots *x509.CertPool
	own   *tls.Certificate // nil: this program has none
}

// server returns why a server is not trusted. Its certificate names the dialed host, or shares a name with this
// program's own certificate: all nodes of a job may have the same one, at any address.
func (p peers) server(addr string, s tls.ConnectionState) error {
	leaf := s.PeerCertificates[0]
	if err := p.signed(s, x509.ExtKeyUsageServerAuth); err != nil {
		return p.wrong("the certificate of "+addr, leaf, err)
	}
	host, _, _ := net.SplitHostPort(addr)
	err := leaf.VerifyHostname(host)
	if err != nil && !p.same(leaf) {
		return &Error{fmt.Sprintf("the certificate of %s is for %s, not for %s: issue one with this name in its "+
			"subjectAltName, or give this program a certificate that has one of the same names", addr, names(leaf), host), err}
	}
	return nil
}

// same reports whether a certificate has a name of this program's own.
func (p peers) same(leaf *x509.Certificate) bool {
	return p.own != nil && slices.ContainsFunc(p.own.Leaf.DNSNames, func(name string) bool {
		return slices.Contains(leaf.DNSNames, name)
	})
}

// client returns why a client is not served.
func (p peers) client(s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return &Error{text: "this server requires a certificate of its clients: give --tls-cert and --tls-key " +
			"(DLROVER_TLS_CERT, DLROVER_TLS_KEY)"}
	}
	if err := p.signed(s, x509.ExtKeyUsageClientAuth); err != nil {
		return p.wrong("the client's certificate", s.PeerCertificates[0], err)
	}
	return nil
}

func (p peers) signed(s tls.ConnectionState, use x509.ExtKeyUsage) error {
	between := x509.NewCertPool()
	for _, c := range s.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: p.roots, Intermediates: between,
		KeyUsages: []x509.ExtKeyUsage{use}})
	return err
}

// wrong names the cause.
func (p peers) wrong(what string, leaf *x509.Certificate, err error) error {
	what += " (" + text.EscapeLine(text.Clip(leaf.Subject.String(), maxName)) + ")"
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	switch _, stranger := errors.AsType[x509.UnknownAuthorityError](err); {
	case stranger:
		what += fmt.Sprintf(" is not signed by an authority in --tls-ca=%s: give the file of %s", p.ca,
			text.EscapeLine(text.Clip(leaf.Issuer.String(), maxName)))
	case isInvalid && invalid.Reason == x509.Expired:
		what += fmt.Sprintf(" is valid from %s to %s, and it is %s here: renew it, or set the clock",
			stampText(leaf.NotBefore), stampText(leaf.NotAfter), stampText(time.Now()))
	case isInvalid && invalid.Reason == x509.IncompatibleUsage:
		what += " is not for this use: its extended key usage needs serverAuth where it serves, and clientAuth where it " +
			"connects"
	default:
		what += ": " + err.Error()
	}
	return &Error{what, err}
}

func stampText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

const (
	maxName  = 200 // bytes of a name in an error
	maxNames = 10  // in an error
)

// names are those for which a certificate is, to be read.
func names(c *x509.Certificate) string {
	all := slices.Clone(c.DNSNames)
	for _, ip := range c.IPAddresses {
		all = append(all, ip.String())
	}
	if len(all) == 0 {
		return "no name"
	}
	return text.EscapeLine(text.Clip(strings.Join(all[:min(len(all), maxNames)], ", "), maxName))
}
