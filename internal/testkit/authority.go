package testkit

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Authority signs certificates. CA is the path of its own.
type Authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  crypto.Signer
	CA   string
}

// NewAuthority makes an authority of this name.
func NewAuthority(t testing.TB, name string) *Authority {
	t.Helper()
	a := &Authority{t: t, CA: filepath.Join(t.TempDir(), "ca.crt")}
	c := &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign}
	a.cert, a.key = c, nil
	a.cert, a.key = a.sign(c, a.CA, "")
	return a
}

// Issue writes a certificate, and its key, for names and addresses, which may be changed before it is signed.
func (a *Authority) Issue(dir string, change func(*x509.Certificate), names ...string) (cert, key string) {
	a.t.Helper()
	c := &x509.Certificate{Subject: pkix.Name{CommonName: names[0]},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, name)
		}
	}
	if change != nil {
		change(c)
	}
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	a.sign(c, cert, key)
	return cert, key
}

// sign signs with the authority's key, or a certificate's own.
func (a *Authority) sign(c *x509.Certificate, path, keyPath string) (*x509.Certificate, crypto.Signer) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	signer := a.key
	if signer == nil {
		signer = key
	}
	c.SerialNumber = big.NewInt(time.Now().UnixNano())
	if c.NotBefore.IsZero() {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), signer)
	require.NoError(a.t, err)
	a.write(path, "CERTIFICATE", der)
	if keyPath != "" {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(a.t, err)
		a.write(keyPath, "PRIVATE KEY", der)
	}
	cert, err := x509.ParseCertificate(der)
	require.NoError(a.t, err)
	return cert, key
}

// write replaces a file, as a Secret's is: readers see the former one, or the new one.
func (a *Authority) write(path, kind string, der []byte) {
	a.t.Helper()
	data := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	require.NoError(a.t, os.WriteFile(path+".new", data, 0o600))
	require.NoError(a.t, os.Rename(path+".new", path))
}
