package page

import (
	"encoding/json"
	"fmt"
	"net/http"

	"dlrover-run/internal/app/answers"
	"dlrover-run/rendezvous"
)

// orderHeader comes with orders from the script. No form, and no script of another page, can send it.
const orderHeader = "X-Dlrover-Page"

// Orders of the page alone, which the run does not hear of. The last two are answered by a file.
const (
	collectStacks = "stacks"
	takeProfile   = "profile"
	makeBundle    = "bundle"
)

// wish is an order as it comes.
type wish struct {
	Kind rendezvous.OrderKind `json:"kind"`
	Node string               `json:"node"`
	Rank string               `json:"rank"`
}

// order passes on an order of a visitor.
func (p *Page) order(w http.ResponseWriter, req *http.Request) {
	if req.Header.Get(orderHeader) == "" || !sameOrigin(req) {
		http.Error(w, "orders come from the page's own script", http.StatusForbidden)
		return
	}
	var o wish
	err := json.NewDecoder(req.Body).Decode(&o)
	switch {
	case err != nil:
	case o.Kind == takeProfile || o.Kind == makeBundle:
		p.download(w, req, o)
		return
	case o.Kind == collectStacks:
		err = p.cfg.Source.Collect(req.Context(), req.PathValue("run"))
	case !answers.Pressable(o.Kind):
		err = fmt.Errorf("%q is not an order of the page", o.Kind)
	default:
		err = p.cfg.Source.Order(req.Context(), req.PathValue("run"), rendezvous.Order{
			Kind: o.Kind, Node: o.Node, Cause: "operator", Text: "ordered on the page"})
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	p.logOrder(req, o)
	w.WriteHeader(http.StatusNoContent)
}

func (p *Page) logOrder(req *http.Request, o wish) {
	p.cfg.Log.Info("an order was given on the page", "run_id", req.PathValue("run"), "kind", o.Kind, "node", o.Node,
		"rank", o.Rank, "from", req.RemoteAddr)
}
