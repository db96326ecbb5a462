package kube_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// certify writes what an API server on 127.0.0.1 needs: ca.crt, server.crt and server.key.
func certify(t *testing.T, dir string) {
	t.Helper()
	authority, server := template(1, "kubetest"), template(2, "kube-apiserver")
	authority.IsCA, authority.KeyUsage = true, x509.KeyUsageCertSign
	server.KeyUsage, server.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	server.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	signer, key := newKey(t), newKey(t)
	text, err := x509.CreateCertificate(rand.Reader, authority, authority, signer.Public(), signer)
	writePEM(t, filepath.Join(dir, "ca.crt"), "CERTIFICATE", text, err)
	text, err = x509.CreateCertificate(rand.Reader, server, authority, key.Public(), signer)
	writePEM(t, filepath.Join(dir, "server.crt"), "CERTIFICATE", text, err)
	text, err = x509.MarshalECPrivateKey(key)
	writePEM(t, filepath.Join(dir, "server.key"), "EC PRIVATE KEY", text, err)
}

func template(serial int64, name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	return key
}

func writePEM(t *testing.T, path, kind string, text []byte, err error) {
	t.Helper()
	check(t, err)
	write(t, path, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: text})))
}
